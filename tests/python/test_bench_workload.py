"""The statistics that the benchmarks print."""

import pytest
import workload


@pytest.mark.parametrize(
    ("samples", "interval"),
    [
        ([3.0], (3.0, 3.0)),
        ([2.0, 1.0, 5.0], (1.0, 5.0)),
        (range(1, 10), (2, 8)),  # from the tables of the sign test: of 9 samples the second and the eighth
        (range(1, 21), (6, 15)),
        (range(1, 101), (40, 61)),
    ],
)
def test_the_median_lies_between_two_of_the_samples(samples, interval):
    assert workload.median_interval(samples) == interval


def test_a_summary_shows_the_median_and_its_interval():
    assert workload.summary([0.5, 1.5, 1.0], 2) == "1.00 (0.50 - 1.50)"
