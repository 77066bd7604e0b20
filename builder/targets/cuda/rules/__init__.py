"""How a node's value is written: op → rule(section, node, index) -> value."""
