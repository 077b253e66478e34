"""Which steps become groups: the preference against uniform choice, on recorded traffic."""
