"""Who shares a table: copies for those who no longer share, one table for those who now do."""

from __future__ import annotations

import torch
from torch import Tensor

from relpos_fairseq.conversion.layouts import Params
from relpos_fairseq.conversion.report import ConversionReport
from relpos_fairseq.scheme import PositionScheme


def spread_heads(params: Params, scheme: PositionScheme, report: ConversionReport) -> Params:
    """Return parameters for the number of tables that `scheme` has: one, or one a head."""
    result = {}
    for name, value in params.items():
        table = scheme.table_of(name)
        if not table.has_heads:
            result[name] = value
            continue
        tables = table.by_head(value, scheme.shape.head_dim)
        if scheme.own_scale is not None and tables.size(0) != scheme.table_heads:
            if tables.size(0) == 1:
                tables = tables.expand(scheme.table_heads, *tables.shape[1:])
            else:
                tables = _merged(tables, f"{scheme.name}: {name} of all heads", report)[None]
        result[name] = table.stored(tables)
    return result


def merge_layers(layers: list[Params], parts: tuple[str, ...], name: str, report: ConversionReport) -> list[Params]:
    """Return those parameters that all layers have in common, one for all that have any."""
    merged = {
        part: _merged(torch.stack([p[part] for p in layers if p]), f"{name}: {part} of all layers", report)
        for part in parts
    }
    return [params | merged if params else {} for params in layers]


def _merged(tables: Tensor, what: str, report: ConversionReport) -> Tensor:
    """Return the one table that all are, or their mean, which is a loss."""
    if bool((tables == tables[:1]).all()):
        return tables[0]
    mean = tables.mean(0)
    error = float((tables - mean).abs().max())
    report.lose(f"{what} become one table, their mean", error)
    return mean
