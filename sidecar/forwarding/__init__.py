"""From the proxy's outbox to Kafka: a process of its own, which the proxy starts and watches."""
