"""The admin API: routes, authentication, paging, errors, and its client."""
