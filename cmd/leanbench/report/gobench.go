package report

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"regexp"
	"runtime"
	"strconv"
	"strings"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// convertBench converts the output of go test -bench into a report.
func convertBench(flags *flag.FlagSet) func(stdout, stderr io.Writer) error {
	from := flags.String("from", "", "`file` that go test -bench wrote")
	to := flags.String("json", "", "`file` to write the report to")
	line := flags.String("command", "", "the command `line` that was run")
	who := flags.Int("contender", 1, "which part of a benchmark's `name` behind its first is the contender: 1, 2, ...")
	return func(stdout, stderr io.Writer) error {
		if *from == "" || *to == "" || *line == "" || *who < 1 {
			return errors.New("-from, -json and -command are needed, and -contender is 1 or more")
		}
		in, err := os.Open(*from)
		if err != nil {
			return err
		}
		defer in.Close()
		r, err := parseBench(in, *who)
		if err != nil {
			return fmt.Errorf("%s: %w", *from, err)
		}
		// The benchmarks are assumed to have run on this machine, with the same environment variables.
		here, err := measure.ThisMachine(runtime.NumCPU())
		if err != nil {
			return err
		}
		here.Workers, here.Load = max(1, r.Machine.Workers), -1
		if r.Machine.CPU != "" {
			here.CPU = r.Machine.CPU
		}
		r.Command, r.Machine = *line, here
		return r.Save(*to)
	}
}

var threads = regexp.MustCompile(`-(\d+)$`)

// parseBench parses benchmark lines. The function is the table, part who of the name is the contender, and
// the other parts are the case.
func parseBench(in io.Reader, who int) (*measure.Report, error) {
	r := &measure.Report{Machine: measure.Machine{Load: -1}, Figures: []measure.Figure{}}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		if cpu, ok := strings.CutPrefix(lines.Text(), "cpu: "); ok {
			r.Machine.CPU = cpu
		}
		f := strings.Fields(lines.Text())
		if len(f) < 4 || !strings.HasPrefix(f[0], "Benchmark") {
			continue
		}
		name := f[0]
		if m := threads.FindStringSubmatch(name); m != nil {
			name = strings.TrimSuffix(name, m[0])
			r.Machine.Workers, _ = strconv.Atoi(m[1])
		}
		parts := strings.Split(name, "/")
		if len(parts) <= who {
			return nil, fmt.Errorf("%q has no part %d", name, who)
		}
		is := append(append([]string{}, parts[1:who]...), parts[who+1:]...)
		row := r.Row(parts[0], strings.Join(is, "/"), parts[who])
		for i := 2; i+1 < len(f); i += 2 {
			v, err := strconv.ParseFloat(f[i], 64)
			if err != nil {
				return nil, fmt.Errorf("%q: %w", name, err)
			}
			row.Add(measure.Metric(f[i+1]), v, nil)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if len(r.Figures) == 0 {
		return nil, errors.New("there is no benchmark in it")
	}
	return r, nil
}
