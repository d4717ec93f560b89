"""The page that shows paper sessions; extra `dashboard`.

`book` reads a journal's events, `session` turns what was read into a view model, `sources` finds
and follows journals, and `server` serves pages, with templates and scripts that only place texts
and numbers of a view model.
"""
