package mapped

import (
	"os"
	"unsafe"

	"golang.org/x/sys/windows"
)

// mapping maps the file's first size bytes, read-only.
func mapping(f *os.File, size int) (data []byte, unmap func() error, err error) {
	h, err := windows.CreateFileMapping(windows.Handle(f.Fd()), nil, windows.PAGE_READONLY, 0, 0, nil)
	if err != nil {
		return nil, nil, os.NewSyscallError("CreateFileMapping", err)
	}
	at, err := windows.MapViewOfFile(h, windows.FILE_MAP_READ, 0, 0, uintptr(size))
	_ = windows.CloseHandle(h) // the view keeps the mapping open
	if err != nil {
		return nil, nil, os.NewSyscallError("MapViewOfFile", err)
	}
	// The view is outside of Go's heap, so its address is not a pointer that the garbage collector tracks.
	data = unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&at))), size)
	return data, func() error { return os.NewSyscallError("UnmapViewOfFile", windows.UnmapViewOfFile(at)) }, nil
}
