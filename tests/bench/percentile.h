// Order statistics of what benches measure.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace moed::bench {

/// The value at or below which `share` of the values lie, by nearest rank. values: at least one.
template <class T>
double percentile(std::vector<T> values, double share) {
  const auto rank = static_cast<size_t>(std::ceil(share * static_cast<double>(values.size())));
  const auto at = values.begin() + static_cast<ptrdiff_t>(std::max<size_t>(rank, 1) - 1);
  std::nth_element(values.begin(), at, values.end());
  return static_cast<double>(*at);
}

}  // namespace moed::bench
