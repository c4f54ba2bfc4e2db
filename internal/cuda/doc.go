// Package cuda is the CUDA driver API without cgo: devices, memory, streams,
// events, modules, launches and graphs, through the library that the NVIDIA
// driver itself installs. No toolkit, header or C compiler is needed, and a
// program that never calls [Load] never opens the library.
//
// # Builds
//
// Linux and Windows on amd64 and arm64 have it; elsewhere, and under the build
// tag nogpu, Load gives [ErrNoDevice]. On Linux a program that links this
// package is linked to the C library's dynamic loader even with CGO_ENABLED=0,
// so it starts only where glibc is; the tag gives a static program again.
//
// # Lifetimes
//
// A [Driver] is the loaded library. [Driver.Open] retains the primary context
// of a GPU, the one that every other user of the process shares too. A
// [Device] knows every buffer, stream, event, module and graph made on it:
// each has a Close of its own, [Device.Close] closes what is still open, the
// latest first, after waiting for the GPU, and then gives the context back.
// There are no finalizers and no goroutines. The use of something closed is
// [ErrClosed], a second Close too; Close waits for calls in flight.
//
// [Driver.Adopt] works in a context that is someone else's. That goes when its
// owner destroys it, and everything on it; calls then are [ErrClosed].
//
// What the driver can't be asked is the caller's to keep: work that is queued
// on a stream, and graphs, name memory by its address. A [Buffer] may be closed
// while queued work uses it, since the driver then waits, but not before a
// graph that names it is launched again; a [Host] buffer only when the copies
// that use it are done.
//
// # Threads
//
// A context is current for a thread of the operating system. Every call locks
// its goroutine to a thread, makes the device's context current and afterwards
// puts back the one that was, so that goroutines may use a device freely and
// other CUDA code of the process keeps its own context. Everything but [Args]
// may be used by several goroutines at once.
//
// # Streams
//
// All streams are non-blocking: they don't wait for the legacy default stream,
// nor it for them, but in a context of someone else, where they do. Calls without a stream run on a stream that the device keeps
// for itself and return when they are done; they order with nothing else, so
// wait for the work that they depend on first.
//
// A stream may put small copies off, to have one kernel make several of them: see
// [Stream.PutOff]. Their order with everything else stays that of the calls.
//
// # Several devices
//
// [Device.Reach] lets what runs on a device use another one's memory: copies and kernels
// name it by its address, and streams wait for the other's events. The work of a
// [Stream.Capture] may spread over streams of such devices, which fork from the one that
// is captured and come back to it by events; the graph is launched as one.
//
// # Errors
//
// A failed call is an [Error]: CUDA_ERROR_NAME: text (call, arguments). It
// matches the sentinels ([ErrOutOfMemory] and so on) under [errors.Is].
package cuda
