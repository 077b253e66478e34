"""GRPO: advantages, losses, packing, log-probabilities and the optimiser steps."""
