"""The page that shows paper sessions; extra `dashboard`.

`paper.tally` folds a journal's events, `session` turns that into a view model, `sources` finds and
follows journals, and `server` serves pages, with templates and scripts that only place texts
and numbers of a view model.
"""
