package memory

import (
	"runtime"
	"testing"
	"testing/fstest"
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
	if err := Check(1); err != nil {
		t.Error(err)
	}
	if err := Check(1 << 60); err == nil {
		t.Error("there is an exabyte")
	}
}

func TestOfLinux(t *testing.T) {
	const meminfo = "MemTotal:       1000 kB\nMemFree:        100 kB\nMemAvailable:    800 kB\n"
	for name, c := range map[string]struct {
		files map[string]string
		want  Free
		known bool
	}{
		"nothing":      {nil, Free{Of: "the machine"}, false},
		"no cgroup":    {map[string]string{"proc/meminfo": meminfo}, Free{800 << 10, 1000 << 10, "the machine"}, true},
		"an old Linux": {map[string]string{"proc/meminfo": "MemTotal: 1000 kB\n"}, Free{0, 1000 << 10, "the machine"}, false},
		"version 2": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a/b\n",
			"sys/fs/cgroup/a/b/memory.max": "500000\n", "sys/fs/cgroup/a/b/memory.current": "300000\n",
			"sys/fs/cgroup/a/b/memory.stat": "anon 5\ninactive_file 50000\n",
		}, Free{250_000, 500_000, "cgroup /a/b"}, true},
		"a cgroup around it": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/a/b/c\n",
			"sys/fs/cgroup/a/b/c/memory.max": "max\n", "sys/fs/cgroup/a/b/c/memory.current": "1\n",
			"sys/fs/cgroup/a/b/memory.max": "500000\n", "sys/fs/cgroup/a/b/memory.current": "300000\n",
			"sys/fs/cgroup/a/memory.max": "400000\n", "sys/fs/cgroup/a/memory.current": "399999\n",
		}, Free{1, 400_000, "cgroup /a"}, true},
		"in a container, by its mount": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/../../docker/x\n",
			"sys/fs/cgroup/memory.max": "500000\n", "sys/fs/cgroup/memory.current": "300000\n",
		}, Free{200_000, 500_000, "cgroup /"}, true},
		"above its limit": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/\n",
			"sys/fs/cgroup/memory.max": "5000\n", "sys/fs/cgroup/memory.current": "6000\n",
		}, Free{0, 5000, "cgroup /"}, true},
		"more than the machine has": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/\n",
			"sys/fs/cgroup/memory.max": "5000000\n", "sys/fs/cgroup/memory.current": "6000\n",
		}, Free{800 << 10, 1000 << 10, "the machine"}, true},
		"version 1": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "4:cpu,memory:/x/y\n3:cpuset:/\n0::/\n",
			"sys/fs/cgroup/memory/x/y/memory.limit_in_bytes": "9223372036854771712\n", "sys/fs/cgroup/memory/x/y/memory.usage_in_bytes": "3\n",
			"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "70000\n", "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "30000\n",
			"sys/fs/cgroup/memory/x/memory.stat": "inactive_file 1\ntotal_inactive_file 10000\n",
		}, Free{50_000, 70_000, "cgroup /x"}, true},
		"odd files": {map[string]string{
			"proc/meminfo": meminfo + "\nMemAvailable: -5 kB\nx\n", "proc/self/cgroup": "\n0\n0::\nmemory\n0::/a\n",
			"sys/fs/cgroup/a/memory.max": "many\n", "sys/fs/cgroup/a/memory.current": "-1",
		}, Free{800 << 10, 1000 << 10, "the machine"}, true},
	} {
		root := fstest.MapFS{}
		for path, text := range c.files {
			root[path] = &fstest.MapFile{Data: []byte(text)}
		}
		if got, known := ofLinux(root); got != c.want && c.known || known != c.known {
			t.Errorf("%s: %+v, %t; want %+v, %t", name, got, known, c.want, c.known)
		}
	}
}
