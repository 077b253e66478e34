"""What limits learning, in the status: the places for groups, and the budgets."""
