"""An inference engine on CPU for tests: its workers are processes, its client is vLLM's in form."""
