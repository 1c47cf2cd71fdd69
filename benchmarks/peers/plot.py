"""Plots a run: one bar per case with its range, and the ratio to our comparable case."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # no screen is needed
mpl.rcParams["svg.hashsalt"] = "dispatcher"  # the same figures, the same file

from matplotlib import pyplot

from benchmarks.peers import ours
from benchmarks.peers.measuring import median_rate
from benchmarks.peers.report import Cases, described, ratios

OUR_COLOUR = "#1f6feb"
PEERS_COLOUR = "#8b949e"
NOTE = (
    "Two worker processes each. Celery, dramatiq and `published`: messages are on RabbitMQ before the clock starts.\n"
    f"Stock peers are compared with ours at its defaults, the others with ours tuned ({described(ours.TUNED)}).\n"
    "post_office-stock and post_office-tuned take no lease: they send a batch, then mark it in one statement."
)


def plot(folder: Path, cases: Cases, subtitle: str) -> None:
    """Write `peers.png` and `peers.svg`."""
    names = [name for name, _ in cases]
    rates = [[result.emails_per_second for result in results] for results in cases.values()]
    medians = [median_rate(results) for results in cases.values()]
    below = [median - min(several) for median, several in zip(medians, rates, strict=True)]
    above = [max(several) - median for median, several in zip(medians, rates, strict=True)]
    figure, axes = pyplot.subplots(figsize=(9, 0.5 * len(names) + 1.8), layout="constrained")
    colours = [OUR_COLOUR if name in ours.NAMES else PEERS_COLOUR for name in names]
    places = range(len(names))
    axes.barh(places, medians, xerr=[below, above], color=colours, ecolor="#24292f", capsize=3)
    axes.set_yticks(places, labels=names)
    for place, results, median in zip(places, cases.values(), medians, strict=True):
        beside = ", ".join(f"{name}: {ratio:.1f} ×" for name, ratio in ratios(cases, results).items())
        words = f"  {median:,.0f}/s" + (f"  ({beside})" if beside else "")
        axes.text(median + above[place], place, words, va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(right=1.25 * max(medians))
    axes.set_xlabel("emails per second, accepted by the provider and recorded (median and range)")
    axes.set_title(
        "The same job on the same machine: SendGrid over TLS, PostgreSQL and RabbitMQ, all durable", fontsize=11
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(f"{NOTE}\n{subtitle}", fontsize=7)
    for ending in ("png", "svg"):
        figure.savefig(folder / f"peers.{ending}", dpi=150)
    pyplot.close(figure)
