"""The status page at `/` of the admin listener: rendered here, filled by the admin API."""
