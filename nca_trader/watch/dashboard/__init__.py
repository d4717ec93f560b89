"""The page that shows paper sessions and training runs; extra `dashboard`.

`book` reads a journal's events, `session` and `training` turn what was read into a view model,
`sight` computes what the agent sees, `sources` finds and follows journals and runs, and `server`
serves pages, with templates and scripts that only place texts and numbers of a view model.
"""
