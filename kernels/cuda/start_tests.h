// What is proven before a back end says that it is ready.
#pragma once

#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "kernels/cuda/lane.h"

namespace moed::cuda {

/// Whether streams that wait stop others: while all `lanes` wait, `first` and the side stream have to run, and each
/// lane that is let go while those before it still wait. False: why, and the remedy.
bool prove_streams(const Shop& shop, cudaStream_t first, const std::vector<cudaStream_t>& lanes, std::string& why);

}  // namespace moed::cuda
