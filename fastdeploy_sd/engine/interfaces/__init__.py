"""What the engine asks of others: executor, block store, grammars, KV connector."""
