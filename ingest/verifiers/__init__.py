"""Verifiers check answers deterministically; with the judge's scores they make the reward."""
