"""Bars and features: reading and checking, samples, calendars, shards, online features."""

from nca_trader.data.bars import validate as validate
from nca_trader.data.calendar import Sessions as Sessions
from nca_trader.data.shards import open_shards as open_shards
from nca_trader.data.shards import write_shards as write_shards
