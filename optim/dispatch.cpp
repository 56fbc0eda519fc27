#include "optim/kernels.h"

namespace tierflow::optim {

std::size_t update_blocks(const Update& u, std::size_t begin, std::size_t end) { return update_blocks_scalar(u, begin, end); }
const char* instruction_set() { return "SCALAR"; }

}  // namespace tierflow::optim
