"""Bars and features: reading and checking, samples, calendars, shards, online features."""

from nca_trader.data.bars import read_bars as read_bars
from nca_trader.data.bars import validate as validate
from nca_trader.data.calendar import EVERY_DAY as EVERY_DAY
from nca_trader.data.calendar import FX_WEEK as FX_WEEK
from nca_trader.data.calendar import Sessions as Sessions
from nca_trader.data.calendar import new_york as new_york
from nca_trader.data.shards import open_shards as open_shards
from nca_trader.data.shards import stream as stream
from nca_trader.data.shards import write_shards as write_shards
