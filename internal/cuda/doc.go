// Package cuda is the CUDA driver API without cgo: devices, memory, streams, events, modules, launches and graphs,
// through the library that the NVIDIA driver installs. No toolkit, header or C compiler is needed. A program that
// never calls [Load] never opens the library.
//
// # Builds
//
// The package works on Linux and Windows on amd64 and arm64. Elsewhere, and under the build tag nogpu, Load returns
// [ErrNoDevice]. On Linux a program that links this package is linked to the C library's dynamic loader even with
// CGO_ENABLED=0, so the program needs glibc. The tag nogpu makes a static program.
//
// # Lifetimes
//
// A [Driver] is the loaded library. [Driver.Open] retains the primary context of a GPU, which all users in the
// process share. A [Device] knows every buffer, stream, event, module and graph on it. Each object has a Close.
// [Device.Close] waits for the GPU, closes all open objects, the newest first, and releases the context. There are no
// finalizers and no goroutines. A use of a closed object, a second Close included, is [ErrClosed]. Close waits for
// running calls.
//
// [Driver.Adopt] works in a context with another owner. When the owner destroys the context, all objects in it are
// gone, and calls return [ErrClosed].
//
// Callers keep what the driver can't be asked: queued work and graphs name memory by address. A [Buffer] may be
// closed while queued work uses it, since the driver then waits. A graph that names a closed buffer must not be
// launched again. A [Host] buffer may be closed only after its copies are done.
//
// # Threads
//
// A context is current for a thread of the operating system. Every call locks its goroutine to a thread, makes the
// device's context current, and afterwards restores the earlier context. So goroutines may use a device freely, and
// other CUDA code of the process keeps its context. Everything except [Args] may be used by several goroutines at
// once.
//
// # Streams
//
// All streams are non-blocking: they and the legacy default stream do not wait for each other, except in an adopted
// context. Calls without a stream run on a separate stream of the device and return when they are done. Such calls
// are ordered with nothing else, so wait first for the work that they depend on.
//
// A stream may defer small copies, so that one kernel makes several of them: see [Stream.PutOff]. The order with all
// other work stays the order of the calls.
//
// # Several devices
//
// [Device.Reach] lets work on a device use another device's memory: copies and kernels use its addresses, and streams
// wait for its events. The work of a [Stream.Capture] may spread over streams of such devices, which fork from the
// captured stream and join it by events. The graph is launched as one.
//
// # Errors
//
// A failed call is an [Error]: CUDA_ERROR_NAME: text (call, arguments). An Error matches the sentinels
// ([ErrOutOfMemory] and so on) under [errors.Is].
package cuda
