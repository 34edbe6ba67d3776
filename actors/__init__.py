"""Everything that has an inbox, and the kit it is made of. Runs on trio; imports `storage`, never
`runtime`.
"""
