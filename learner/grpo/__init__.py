"""GRPO: advantages, losses, checks of the groups, and the optimiser steps."""
