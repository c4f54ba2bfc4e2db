package measure

import (
	"fmt"
	"os"
	"runtime"
	"strings"

	"gorgonia.org/leanattention/internal/cpu"
)

// Machine describes the machine that figures were measured on.
type Machine struct {
	CPU     string `json:"cpu"`
	Cores   int    `json:"cores"`
	Workers int    `json:"workers"` // compute threads
	Kernels string `json:"kernels"` // instruction set of leanattention's kernels
	Go      string `json:"go"`
	GPU     string `json:"gpu,omitempty"`

	// Load is the machine's load average before the measurement, caused by other programs. A high load
	// invalidates the figures. -1 means unknown.
	Load float64 `json:"load"`
}

func (m Machine) String() string {
	var parts []string
	add := func(there bool, format string, args ...any) {
		if there {
			parts = append(parts, fmt.Sprintf(format, args...))
		}
	}
	add(m.CPU != "", "%s", m.CPU)
	add(m.Cores > 0, "%d of %d cores", m.Workers, m.Cores)
	add(m.Kernels != "", "%s kernels", m.Kernels)
	add(m.Go != "", "%s", m.Go)
	add(m.Load >= 0, "load %.1f before", m.Load)
	add(m.GPU != "", "%s", m.GPU)
	return strings.Join(parts, ", ")
}

// ThisMachine limits the process to the given number of threads from now on and describes the machine.
func ThisMachine(workers int) (Machine, error) {
	if n := runtime.NumCPU(); workers < 1 || workers > n {
		return Machine{}, fmt.Errorf("%d workers on %d cores", workers, n)
	}
	if err := cpu.CheckTier(); err != nil {
		return Machine{}, err
	}
	runtime.GOMAXPROCS(workers)
	return Machine{
		CPU: cpuName(), Cores: runtime.NumCPU(), Workers: workers, Kernels: cpu.InUse().String(), Go: runtime.Version(), Load: loadAverage(),
	}, nil
}

// loadAverage returns the load average of the last minute, or -1 where the system does not report it.
func loadAverage() float64 {
	data, _ := os.ReadFile("/proc/loadavg") // Linux only
	load := -1.0
	fmt.Sscan(string(data), &load) // keeps -1 if there is no number
	return load
}

// cpuName returns the processor's name, or the architecture where the system does not report the name.
func cpuName() string {
	data, _ := os.ReadFile("/proc/cpuinfo") // Linux only
	for line := range strings.Lines(string(data)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return runtime.GOARCH
}
