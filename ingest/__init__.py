"""From recorded traffic to scored groups of answers: selection, sampling, judging."""
