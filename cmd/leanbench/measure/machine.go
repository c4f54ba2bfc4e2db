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

	// Load is the machine's load average before the measurement, of others that
	// used it: with much of it no figure is worth anything. -1: not known.
	Load float64 `json:"load"`
}

func (m Machine) String() string {
	s := fmt.Sprintf("%s, %d of %d cores, %s kernels, %s", m.CPU, m.Workers, m.Cores, m.Kernels, m.Go)
	if m.Load >= 0 {
		s += fmt.Sprintf(", load %.1f before", m.Load)
	}
	return s
}

// ThisMachine lets the process use a number of threads from now on and
// describes it.
func ThisMachine(workers int) (Machine, error) {
	if n := runtime.NumCPU(); workers < 1 || workers > n {
		return Machine{}, fmt.Errorf("%d workers on %d cores", workers, n)
	}
	kernels, err := cpu.Tier()
	if err != nil {
		return Machine{}, err
	}
	runtime.GOMAXPROCS(workers)
	return Machine{
		CPU: cpuName(), Cores: runtime.NumCPU(), Workers: workers, Kernels: kernels, Go: runtime.Version(), Load: loadAverage(),
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
