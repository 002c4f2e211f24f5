"""The engine on a thread of its own, seen from an asyncio loop."""
