"""OpenTelemetry spans and metrics of captured requests."""
