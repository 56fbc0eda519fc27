#pragma once
// The measured rates of a machine, and the measured times of a model's stages on it, as the simulator takes them.

namespace tierflow::swap {

// How fast the machine does each kind of work while it does nothing else. Work with a rate of 0 takes no time.
struct MachineRates {
  double disk_read = 0, disk_write = 0;  // bytes a second, of all drives together
  double disk_mixed = 0;                 // of both directions together, as many bytes each; 0: half duplex
  double upload = 0, download = 0;       // bytes a second
  double cast = 0;                       // parameters a second: fp32 gradients on the device to bf16 on the host
  double fill = 0;                       // bytes a second: zeroing a gradient on the device
  double measure = 0;                    // parameters a second, on all cores
  double checksum = 0;                   // bytes a second, on one core
  double memory = 0;  // bytes a second of host memory, for all readers and writers together; 0: never the limit
  int cores = 1;      // of the machine
  int threads = 1;    // that compute with, and that update
  bool compute_on_cores = true;  // the device is the CPU: computing and copying take cores from the update
};

// Seconds of one micro-batch in a stage; head: forward and backward of the last one.
struct StageSeconds {
  double forward = 0, backward = 0, head = 0, evaluate = 0;
  // Where the activations are kept; where they are swapped, with the copies into and out of the slot.
  double forward_keeping = 0, backward_kept = 0, forward_swapping = 0, backward_swapped = 0;

  StageSeconds& operator*=(double factor) {
    for (double* seconds : {&forward, &backward, &head, &evaluate, &forward_keeping, &backward_kept, &forward_swapping,
                            &backward_swapped})
      *seconds *= factor;
    return *this;
  }
};

}  // namespace tierflow::swap
