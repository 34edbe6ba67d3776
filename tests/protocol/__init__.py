"""The protocol of `docs/protocol.md`, checked exhaustively, and held against the real engine."""
