package measure

import (
	"fmt"
	"os"
	"runtime"
	"strings"

	"gorgonia.org/leanattention/internal/cpu"
)

// Machine is what figures were measured on.
type Machine struct {
	CPU     string `json:"cpu"`
	Cores   int    `json:"cores"`
	Workers int    `json:"workers"` // threads that computed
	Kernels string `json:"kernels"` // of leanattention: their instruction set
	Go      string `json:"go"`
	GPU     string `json:"gpu,omitempty"`

	// Load is the machine's load average before the measurement, of others that
	// used it: with much of it no figure is worth anything. -1: not known.
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

// ThisMachine lets the process use a number of threads from now on and
// describes it.
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

// loadAverage is that of the last minute, where the system tells it.
func loadAverage() float64 {
	data, _ := os.ReadFile("/proc/loadavg") // Linux only
	load := -1.0
	fmt.Sscan(string(data), &load) // without a number it stays what it is
	return load
}

// cpuName is the processor's name, where the system tells it.
func cpuName() string {
	data, _ := os.ReadFile("/proc/cpuinfo") // Linux only; without it the architecture has to do
	for line := range strings.Lines(string(data)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return runtime.GOARCH
}
