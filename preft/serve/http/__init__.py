"""The HTTP front end: vLLM's own OpenAI server with adapters as model names, and the process that runs it.

One half is imported by vLLM's server (`endpoint`, an endpoint plugin, and what it installs); the other starts and
watches that server (`launch`, `process`) and needs neither torch nor vllm.
"""
