"""The app's series among Ray's own metrics, which each node of a cluster shows to Prometheus under names with `ray_`.

Nothing is declared here: whatever `metrics.py` collects is passed on, every few seconds. So no request and no token
waits for Ray.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from ray.util.metrics import Counter, Gauge


class RayMetrics:
    """Passes series on to Ray, under their own names and labels.

    Ray's histograms only take one value at a time. The counts by bucket, the number and the sum of a histogram are
    gauges there: `histogram_quantile(0.9, rate(ray_..._bucket[1m]))` reads them all the same.
    """

    def __init__(self) -> None:
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._told: dict[tuple[str, ...], float] = {}  # of each counter's series: its value when Ray was told last

    def tell(self, families: Iterable[Metric]) -> None:
        """Tell Ray how all series stand."""
        for family in families:
            for sample in family.samples:
                if sample.name.endswith("_created"):  # when a series began: nobody asks
                    continue
                if family.type == "counter":
                    self._count(sample, family.documentation)
                else:
                    self._set(sample, family.documentation)

    def _count(self, sample: Sample, what: str) -> None:
        key = (sample.name, *sample.labels.values())
        told = self._told.get(key, 0.0)
        grown = sample.value - (told if sample.value >= told else 0.0)  # a new engine begins at zero
        if grown > 0:
            if sample.name not in self._counters:
                self._counters[sample.name] = Counter(sample.name, what, tuple(sample.labels))
            self._counters[sample.name].inc(grown, sample.labels)
            self._told[key] = sample.value

    def _set(self, sample: Sample, what: str) -> None:
        if sample.name not in self._gauges:
            self._gauges[sample.name] = Gauge(sample.name, what, tuple(sample.labels))
        self._gauges[sample.name].set(sample.value, sample.labels)
