package memory

import (
	"unsafe"

	"golang.org/x/sys/windows"
)

var globalMemoryStatusEx = windows.NewLazySystemDLL("kernel32.dll").NewProc("GlobalMemoryStatusEx")

// now returns the bytes that can be committed.
func now() (Free, bool) {
	var m struct { // MEMORYSTATUSEX
		length, load                                                                                 uint32
		totalPhys, availPhys, totalPage, availPage, totalVirtual, availVirtual, availExtendedVirtual uint64
	}
	m.length = uint32(unsafe.Sizeof(m))
	r, _, _ := globalMemoryStatusEx.Call(uintptr(unsafe.Pointer(&m)))
	return Free{Bytes: int64(m.availPage), Total: int64(m.totalPage), Of: "the machine"}, r != 0
}
