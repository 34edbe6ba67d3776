"""One file per letter of docs/contract.md; each test names the line it proves."""
