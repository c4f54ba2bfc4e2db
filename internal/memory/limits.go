package memory

import (
	"bufio"
	"bytes"
	"io/fs"
	"path"
	"strconv"
	"strings"
)

// ofLinux reads what Linux tells in files: MemAvailable, which counts what the system
// can drop, and the limits of the process's cgroup and of all cgroups around it.
func ofLinux(root fs.ReadFileFS) (Free, bool) {
	info := fields(root, "proc/meminfo")
	least := Free{Bytes: info["MemAvailable:"] << 10, Total: info["MemTotal:"] << 10, Of: "the machine"}
	_, known := info["MemAvailable:"]
	for _, g := range cgroups(root) {
		for dir := g.path; ; dir = path.Dir(dir) {
			if f, ok := g.free(root, dir); ok && (!known || f.Bytes < least.Bytes) {
				least, known = f, true
			}
			if dir == "/" || dir == "." {
				break
			}
		}
	}
	return least, known
}

// cgroup is the process's place in a hierarchy of cgroups that limits memory.
type cgroup struct {
	mount              string // where its files are
	path               string // of the process, from there
	limit, used, cache string // names of the files, and of the statistic of what can be dropped
}

// cgroups are the hierarchies of version 2 and version 1, those that there are. Of a
// process in a container the path may be the host's, of which the container sees the
// last part only: then its own files are at the mount.
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

// free is what the limit of the cgroup in dir leaves, if it has one.
func (g *cgroup) free(root fs.ReadFileFS, dir string) (Free, bool) {
	at := path.Join(g.mount, dir)
	limit, ok := number(root, path.Join(at, g.limit)) // "max" is none
	used, ok2 := number(root, path.Join(at, g.used))
	if !ok || !ok2 || limit >= 1<<60 { // version 1 says so where there is none
		return Free{}, false
	}
	used -= fields(root, path.Join(at, "memory.stat"))[g.cache]
	return Free{Bytes: max(limit-max(used, 0), 0), Total: limit, Of: "cgroup " + dir}, true
}

func number(root fs.ReadFileFS, name string) (int64, bool) {
	text, err := root.ReadFile(name)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(string(bytes.TrimSpace(text)), 10, 64)
	return n, err == nil && n >= 0
}

// fields are the lines of a file that are a name and a number.
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
