"""`onepen stress`: the runtime under everything at once, on the machine of whoever wants to know.

Two processes. `child` is the one under test: it opens the runtime with a scripted `agent`, does
what it is told (`desk`), and looks at itself (`vitals`). The parent is the world around it: `link`
starts the child and talks to it, `people` send messages and do things to their conversations,
`trouble` kills it and starts it again, and `ledger` remembers what was promised.

    plan ─▶ script ─▶ people ─▶ link ═══ wire ═══ child ─▶ the file
                         └─▶ ledger ─▶ verdict ◀─ stored ◀───┘
                                          └─▶ report · page

Everything that is drawn (`script`) is a function of the plan, the seed in it above all. What
depends on when something happens is not, and nobody claims that it is.
"""
