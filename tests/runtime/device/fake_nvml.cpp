// Stands in for the driver's NVML: one card on 0000:65:00.0 that uses 6 J between two looks. In FAKE_NVML_OLD, energy
// and utilisation are told by no card.
namespace {
int running = 0, card = 0;
}

extern "C" {
int nvmlInit_v2() {
  ++running;
  return 0;
}
int nvmlShutdown() {
  --running;
  return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** out) {
  const char* known = "0000:65:00.0";
  while (*known != '\0' && *known == *bus) ++known, ++bus;
  if (*known != *bus) return 6;
  *out = &card;
  return 0;
}
int nvmlDeviceGetPowerUsage(void*, unsigned* milliwatts) {
  *milliwatts = 123400;
  return 0;
}
int nvmlDeviceGetMemoryInfo(void*, unsigned long long* total_free_used) {
  total_free_used[0] = 1000;
  total_free_used[1] = 900;
  total_free_used[2] = 100;
  return 0;
}
int nvmlDeviceGetCurrPcieLinkGeneration(void*, unsigned* value) {
  *value = 4;
  return 0;
}
int nvmlDeviceGetCurrPcieLinkWidth(void*, unsigned* value) {
  *value = 8;
  return 0;
}
int nvmlDeviceGetMaxPcieLinkGeneration(void*, unsigned* value) {
  *value = 4;
  return 0;
}
int nvmlDeviceGetMaxPcieLinkWidth(void*, unsigned* value) {
  *value = 16;
  return 0;
}
#ifdef FAKE_NVML_OLD
int nvmlDeviceGetUtilizationRates(void*, unsigned*) {
  return 3;
}
#else
int nvmlDeviceGetUtilizationRates(void*, unsigned* gpu_and_memory) {
  gpu_and_memory[0] = 87;
  gpu_and_memory[1] = 12;
  return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void*, unsigned long long* millijoules) {
  static unsigned long long looks = 0;
  *millijoules = 1000000 + 6000 * looks++;
  return 0;
}
#endif
int fake_nvml_running() {
  return running;
}
}
