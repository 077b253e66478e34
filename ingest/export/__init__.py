"""Exchanges and scored groups in the forms that people and other trainers read."""
