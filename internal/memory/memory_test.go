package memory

import (
	"errors"
	"math"
	"runtime"
	"testing"
	"testing/fstest"
	"time"
)

func TestNow(t *testing.T) {
	f, known := Now()
	if !known {
		if runtime.GOOS == "linux" || runtime.GOOS == "darwin" || runtime.GOOS == "windows" {
			t.Error("nothing is known")
		}
		return
	}
	t.Log(f)
	if f.Bytes <= 0 || f.Total < f.Bytes || f.Of == "" {
		t.Errorf("%+v", f)
	}
	if err := Check(1, 1); err != nil {
		t.Error(err)
	}
	if err := Check(1<<60, 1); err == nil {
		t.Error("there is an exabyte")
	}
}

func TestOfLinux(t *testing.T) {
	const meminfo = "MemTotal:       1000 kB\nMemFree:        100 kB\nMemAvailable:    800 kB\n"
	unlimited := process{addresses: -1, data: -1, idle: 1 << 20}
	for name, c := range map[string]struct {
		files map[string]string
		want  Free
		known bool
	}{
		"nothing":      {nil, Free{Of: "the machine"}, false},
		"no cgroup":    {map[string]string{"proc/meminfo": meminfo}, Free{800 << 10, 0, 1000 << 10, "the machine"}, true},
		"an old Linux": {map[string]string{"proc/meminfo": "MemTotal: 1000 kB\n"}, Free{0, 0, 1000 << 10, "the machine"}, false},
		"version 2": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a/b\n",
			"sys/fs/cgroup/a/b/memory.max": "500000\n", "sys/fs/cgroup/a/b/memory.current": "300000\n",
			"sys/fs/cgroup/a/b/memory.stat": "anon 5\ninactive_file 50000\n",
		}, Free{250_000, 0, 500_000, "cgroup /a/b"}, true},
		"a cgroup around it": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a/b/c\n",
			"sys/fs/cgroup/a/b/c/memory.max": "max\n", "sys/fs/cgroup/a/b/c/memory.current": "1\n",
			"sys/fs/cgroup/a/b/memory.max": "500000\n", "sys/fs/cgroup/a/b/memory.current": "300000\n",
			"sys/fs/cgroup/a/memory.max": "400000\n", "sys/fs/cgroup/a/memory.current": "399999\n",
		}, Free{1, 0, 400_000, "cgroup /a"}, true},
		"in a container, by its mount": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/../../docker/x\n",
			"sys/fs/cgroup/memory.max": "500000\n", "sys/fs/cgroup/memory.current": "300000\n",
		}, Free{200_000, 0, 500_000, "cgroup /"}, true},
		"above its limit": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/\n",
			"sys/fs/cgroup/memory.max": "5000\n", "sys/fs/cgroup/memory.current": "6000\n",
		}, Free{0, 0, 5000, "cgroup /"}, true},
		"more than the machine has": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/\n",
			"sys/fs/cgroup/memory.max": "5000000\n", "sys/fs/cgroup/memory.current": "6000\n",
		}, Free{800 << 10, 0, 1000 << 10, "the machine"}, true},
		"version 1": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "4:cpu,memory:/x/y\n3:cpuset:/\n0::/\n",
			"sys/fs/cgroup/memory/x/y/memory.limit_in_bytes": "9223372036854771712\n", "sys/fs/cgroup/memory/x/y/memory.usage_in_bytes": "3\n",
			"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "70000\n", "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "30000\n",
			"sys/fs/cgroup/memory/x/memory.stat": "inactive_file 1\ntotal_inactive_file 10000\n",
		}, Free{50_000, 0, 70_000, "cgroup /x"}, true},
		"odd files": {map[string]string{
			"proc/meminfo": meminfo + "\nMemAvailable: -5 kB\nx\n", "proc/self/cgroup": "\n0\n0::\nmemory\n0::/a\n",
			"sys/fs/cgroup/a/memory.max": "many\n", "sys/fs/cgroup/a/memory.current": "-1",
		}, Free{800 << 10, 0, 1000 << 10, "the machine"}, true},
	} {
		root := fstest.MapFS{}
		for path, text := range c.files {
			root[path] = &fstest.MapFile{Data: []byte(text)}
		}
		if got, known := ofLinux(root, unlimited); got != c.want && c.known || known != c.known {
			t.Errorf("%s: %+v, %t; want %+v, %t", name, got, known, c.want, c.known)
		}
	}
}

// TestOfProcess: limits of the process leave the bytes that the process has not mapped yet, less a reserve. Idle
// memory of the heap is already mapped.
func TestOfProcess(t *testing.T) {
	const (
		gb, idle = 1 << 30, 3 << 20
		meminfo  = "MemTotal: 99999999 kB\nMemAvailable: 88888888 kB\nCommitLimit: 6291456 kB\nCommitted_AS: 4194304 kB\n"
		status   = "Name:\tx y\nVmPeak:\t 9999999 kB\nVmSize:\t 2097152 kB\nVmData:\t 1048576 kB\n"
		address  = "the process's address space (ulimit -v)"
		data     = "the process's data (ulimit -d)"
		commits  = "what the machine commits (vm.overcommit_memory is 2)"
	)
	for name, c := range map[string]struct {
		addresses, data int64
		overcommit      string
		want            Free
	}{
		"none":                       {-1, -1, "0", Free{88888888 << 10, 0, 99999999 << 10, "the machine"}},
		"none, and no overcommit":    {-1, -1, "", Free{88888888 << 10, 0, 99999999 << 10, "the machine"}},
		"always overcommitted":       {-1, -1, "1", Free{88888888 << 10, 0, 99999999 << 10, "the machine"}},
		"above what there is":        {900 * gb, 900 * gb, "0", Free{88888888 << 10, 0, 99999999 << 10, "the machine"}},
		"addresses":                  {10 * gb, -1, "0", Free{8*gb - 8*gb/64 - 192<<20 + idle, idle, 10 * gb, address}},
		"data":                       {-1, 5 * gb, "0", Free{4*gb - 4*gb/64 - 64<<20 + idle, idle, 5 * gb, data}},
		"the least: data":            {10 * gb, 5 * gb, "0", Free{4*gb - 4*gb/64 - 64<<20 + idle, idle, 5 * gb, data}},
		"the least: addresses":       {5 * gb, 5 * gb, "0", Free{3*gb - 3*gb/64 - 192<<20 + idle, idle, 5 * gb, address}},
		"commitments":                {-1, -1, "2", Free{2*gb - 2*gb/64 - 192<<20 + idle, idle, 6 * gb, commits}},
		"the least: commitments":     {5 * gb, 5 * gb, "2\n", Free{2*gb - 2*gb/64 - 192<<20 + idle, idle, 6 * gb, commits}},
		"the reserve is all of it":   {2*gb + 100<<20, -1, "0", Free{0, 0, 2*gb + 100<<20, address}},
		"above its limit":            {gb, -1, "0", Free{0, 0, gb, address}},
		"a limit that allows none":   {-1, 0, "0", Free{0, 0, 0, data}},
		"what is mapped is not told": {-1, -1, "many", Free{88888888 << 10, 0, 99999999 << 10, "the machine"}},
	} {
		root := fstest.MapFS{"proc/meminfo": {Data: []byte(meminfo)}, "proc/self/status": {Data: []byte(status)}}
		if c.overcommit != "" {
			root["proc/sys/vm/overcommit_memory"] = &fstest.MapFile{Data: []byte(c.overcommit)}
		}
		if got, known := ofLinux(root, process{c.addresses, c.data, idle}); got != c.want || !known {
			t.Errorf("%s: %+v, %t; want %+v", name, got, known, c.want)
		}
	}
	if got, known := ofLinux(fstest.MapFS{}, process{gb, -1, 0}); !known || got.Of != address || got.Bytes != gb-gb/64-192<<20 {
		t.Errorf("a limit alone: %+v, %t", got, known)
	}
}

// TestCheckAgain: checks query the system again after a quarter of the free bytes is taken.
func TestCheckAgain(t *testing.T) {
	asked, free, end := 0, int64(1000), time.Now().Add(50*time.Millisecond)
	defer Replace(func() (Free, bool) { asked++; return Free{free, 0, 2000, "a test"}, true })()
	check := func(bytes int64, asks int, fits bool) {
		t.Helper()
		before := asked
		err := Check(bytes, bytes)
		var short *Shortage
		if errors.As(err, &short) == fits || !fits && (short.Bytes != bytes || short.Error() != (Free{free, 0, 2000, "a test"}).String()) {
			t.Errorf("%d bytes: %v", bytes, err)
		}
		if asked-before != asks && time.Now().Before(end) { // a query is valid for a tenth of a second
			t.Errorf("%d bytes: asked %d times, want %d", bytes, asked-before, asks)
		}
	}
	check(200, 1, true) // 800 are left, of which 200 need no query
	check(150, 0, true)
	check(50, 0, true)
	free = 600
	check(1, 1, true)
	check(601, 2, false)
	check(600, 1, true)
	free = 1000
	check(100, 1, true)
	for range 4 {
		check(math.MaxInt64, 2, false)
	}
	check(225, 0, true)
	check(1, 1, true)
	check(1000, 1, true)
	check(1, 1, true)
	defer Replace(func() (Free, bool) { asked++; return Free{}, false })()
	if err := Check(math.MaxInt64, math.MaxInt64); err != nil {
		t.Errorf("a system that does not tell: %v", err)
	}
}
