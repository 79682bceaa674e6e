// A device guard for CUDA in a torch that was built without: it remembers the current device of each thread.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

using Guard = c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>;
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}
extern "C" void dry_set_device(int index) { Guard::setDeviceIndex(static_cast<c10::DeviceIndex>(index)); }
extern "C" int dry_get_device() { return Guard::getDeviceIndex(); }
