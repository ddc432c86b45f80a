// What is proven before a back end says that it is ready.
#pragma once

#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "kernels/cuda/side.h"

namespace moed::cuda {

/// Whether streams that wait stop others: lanes wait, and meanwhile `first` and the side stream have to run.
/// `others`: streams of the lanes. False: which stood still, and the remedy.
bool prove_streams(const Driver& driver, Memory& memory, Side& side, Health& health, cudaStream_t first,
                   const std::vector<cudaStream_t>& others, std::string& why);

}  // namespace moed::cuda
