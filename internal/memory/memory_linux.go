package memory

import (
	"io/fs"
	"math/bits"
	"os"
	"runtime/metrics"

	"golang.org/x/sys/unix"
)

func now() (Free, bool) {
	p := process{addresses: rlimit(unix.RLIMIT_AS), data: rlimit(unix.RLIMIT_DATA), idle: idle()}
	if addresses := int64(3 << 30); bits.UintSize == 32 && (p.addresses < 0 || p.addresses > addresses) {
		p.addresses = addresses // the system keeps the fourth gigabyte
	}
	return ofLinux(os.DirFS("/").(fs.ReadFileFS), p)
}

// rlimit returns a limit of the process, or -1 for no limit.
func rlimit(resource int) int64 {
	var r unix.Rlimit
	if err := unix.Getrlimit(resource, &r); err != nil || r.Cur >= 1<<60 {
		return -1
	}
	return int64(r.Cur)
}

// idle returns the bytes of Go's heap without values.
func idle() (bytes int64) {
	s := []metrics.Sample{{Name: "/memory/classes/heap/free:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
	metrics.Read(s)
	for i := range s {
		if s[i].Value.Kind() == metrics.KindUint64 {
			bytes += int64(s[i].Value.Uint64())
		}
	}
	return bytes
}
