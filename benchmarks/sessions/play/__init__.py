"""Plays a scripted conversation: the agents, their clients, and the words of the model."""
