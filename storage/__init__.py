"""What is durable, as plain synchronous code: records, commands, engines, read views."""
