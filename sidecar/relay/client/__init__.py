"""The client's side of the relay: server, connections, request parser, body limits."""
