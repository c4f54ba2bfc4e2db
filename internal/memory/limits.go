package memory

import (
	"bufio"
	"bytes"
	"io/fs"
	"path"
	"strconv"
	"strings"
)

// process has the values of this process that no file has.
type process struct {
	addresses int64 // RLIMIT_AS; negative: no limit
	data      int64 // RLIMIT_DATA; negative: no limit
	idle      int64 // bytes of Go's heap without values: already mapped, so new values take them first
}

// Go's runtime maps more than a value's bytes: arenas of 64 MB, tables, threads, and memory of the collector. Linux
// keeps a reserve where it counts commitments. A limit whose excess ends the process keeps a reserve.
const (
	addressReserve = 192 << 20
	dataReserve    = 64 << 20
	commitReserve  = 192 << 20 // admin_reserve_kbytes, user_reserve_kbytes, and Go's own
	reserveShare   = 64        // a reserve of 1/reserveShare of the free bytes
)

// ofLinux returns the least of these limits, read from files below root ("/" of the system):
//
//   - MemAvailable of the machine, which counts droppable caches;
//   - the limits of the process's cgroup and of all cgroups around it;
//   - RLIMIT_AS and RLIMIT_DATA of p, less the mapped bytes;
//   - what can be committed, if vm.overcommit_memory is 2.
func ofLinux(root fs.ReadFileFS, p process) (Free, bool) {
	info := fields(root, "proc/meminfo")
	least := Free{Bytes: info["MemAvailable:"] << 10, Total: info["MemTotal:"] << 10, Of: "the machine"}
	_, known := info["MemAvailable:"]
	take := func(f Free) {
		f.Bytes = max(f.Bytes, 0)
		if f.Idle = min(f.Idle, f.Bytes); !known || f.Bytes < least.Bytes {
			least, known = f, true
		}
	}
	for _, g := range cgroups(root) {
		for dir := g.path; ; dir = path.Dir(dir) {
			if f, ok := g.free(root, dir); ok {
				take(f)
			}
			if dir == "/" || dir == "." {
				break
			}
		}
	}
	mapped := func(limit, used, reserve int64, of string) {
		left := limit - used
		take(Free{Bytes: left - max(left, 0)/reserveShare - reserve + p.idle, Idle: p.idle, Total: limit, Of: of})
	}
	status := fields(root, "proc/self/status")
	if p.addresses >= 0 {
		mapped(p.addresses, status["VmSize:"]<<10, addressReserve, "the process's address space (ulimit -v)")
	}
	if p.data >= 0 {
		mapped(p.data, status["VmData:"]<<10, dataReserve, "the process's data (ulimit -d)")
	}
	if mode, ok := number(root, "proc/sys/vm/overcommit_memory"); ok && mode == 2 {
		if limit, ok := info["CommitLimit:"]; ok {
			mapped(limit<<10, info["Committed_AS:"]<<10, commitReserve, "what the machine commits (vm.overcommit_memory is 2)")
		}
	}
	return least, known
}

// cgroup is the process's position in a hierarchy of cgroups that limits memory.
type cgroup struct {
	mount              string // folder of the hierarchy's files
	path               string // path of the process, relative to mount
	limit, used, cache string // names of the files, and of the statistic of droppable bytes
}

// cgroups returns the hierarchies of version 2 and version 1 that exist. In a container the path may be the host's,
// of which the container sees only the last part: then the container's files are at the mount.
func cgroups(root fs.ReadFileFS) (list []cgroup) {
	text, err := root.ReadFile("proc/self/cgroup")
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(text)) {
		part := strings.SplitN(strings.TrimSpace(line), ":", 3) // number, controllers, path
		if len(part) != 3 {
			continue
		}
		at := path.Clean("/" + part[2])
		switch {
		case part[0] == "0" && part[1] == "":
			for _, mount := range []string{"sys/fs/cgroup", "sys/fs/cgroup/unified"} {
				list = append(list, cgroup{mount, at, "memory.max", "memory.current", "inactive_file"})
			}
		case strings.Contains(","+part[1]+",", ",memory,"):
			list = append(list, cgroup{"sys/fs/cgroup/memory", at, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"})
		}
	}
	return list
}

// free returns what the limit of the cgroup in dir leaves. ok is false without a limit.
func (g *cgroup) free(root fs.ReadFileFS, dir string) (Free, bool) {
	at := path.Join(g.mount, dir)
	limit, ok := number(root, path.Join(at, g.limit)) // "max" means no limit
	used, ok2 := number(root, path.Join(at, g.used))
	if !ok || !ok2 || limit >= 1<<60 { // version 1 writes a huge number for no limit
		return Free{}, false
	}
	used -= fields(root, path.Join(at, "memory.stat"))[g.cache]
	return Free{Bytes: limit - max(used, 0), Total: limit, Of: "cgroup " + dir}, true
}

func number(root fs.ReadFileFS, name string) (int64, bool) {
	text, err := root.ReadFile(name)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(string(bytes.TrimSpace(text)), 10, 64)
	return n, err == nil && n >= 0
}

// fields returns the lines of a file that are a name and a number.
func fields(root fs.ReadFileFS, name string) map[string]int64 {
	text, err := root.ReadFile(name)
	if err != nil {
		return nil
	}
	all := make(map[string]int64)
	for s := bufio.NewScanner(bytes.NewReader(text)); s.Scan(); {
		f := strings.Fields(s.Text())
		if len(f) < 2 {
			continue
		}
		if n, err := strconv.ParseInt(f[1], 10, 64); err == nil && n >= 0 {
			all[f[0]] = n
		}
	}
	return all
}
