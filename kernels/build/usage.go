package main

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// usage is what a kernel takes on one architecture, as ptxas says.
type usage struct {
	registers, shared, stack, spilled int // spilled: bytes stored and loaded
}

var (
	entryLine  = regexp.MustCompile(`Compiling entry function '([^']*)'`)
	stackLine  = regexp.MustCompile(`(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads`)
	takesLine  = regexp.MustCompile(`Used (\d+) registers`)
	sharedPart = regexp.MustCompile(`(\d+) bytes smem`)
)

// readUsage finds the kernels in a log of ptxas, and returns the lines that it
// has besides: warnings.
func readUsage(log string) (kernels map[string]usage, rest []string) {
	kernels = map[string]usage{}
	var name string
	for line := range strings.Lines(log) {
		line = strings.TrimRight(line, "\n")
		u := kernels[name]
		if m := entryLine.FindStringSubmatch(line); m != nil {
			name, u = m[1], usage{}
		} else if m := stackLine.FindStringSubmatch(line); m != nil {
			u.stack, u.spilled = atoi(m[1]), atoi(m[2])+atoi(m[3])
		} else if m := takesLine.FindStringSubmatch(line); m != nil {
			u.registers = atoi(m[1])
			if m := sharedPart.FindStringSubmatch(line); m != nil {
				u.shared = atoi(m[1])
			}
		} else {
			if !strings.HasPrefix(line, "ptxas info") && strings.TrimSpace(line) != "" {
				rest = append(rest, line)
			}
			continue
		}
		if name != "" {
			kernels[name] = u
		}
	}
	return kernels, rest
}

func atoi(s string) int { n, _ := strconv.Atoi(s); return n } // digits

// entries joins what kernels take on each architecture. All must have the same
// ones.
func entries(archs []string, of []map[string]usage) (map[string]string, error) {
	var all []string
	for _, kernels := range of {
		for name := range kernels {
			if !slices.Contains(all, name) {
				all = append(all, name)
			}
		}
	}
	joined := map[string]string{}
	for _, name := range all {
		var registers, shared, stack, spilled []int
		for i, kernels := range of {
			u, ok := kernels[name]
			if !ok {
				return nil, fmt.Errorf("kernel %s is missing for %s", name, archs[i])
			}
			registers, shared = append(registers, u.registers), append(shared, u.shared)
			stack, spilled = append(stack, u.stack), append(spilled, u.spilled)
		}
		joined[name] = "registers" + numbers(registers)
		for _, more := range []struct {
			what   string
			values []int
		}{{"shared", shared}, {"stack", stack}, {"spilled", spilled}} {
			if slices.Max(more.values) > 0 {
				joined[name] += ", " + more.what + numbers(more.values)
			}
		}
	}
	return joined, nil
}

// numbers is one number if all are the same.
func numbers(values []int) (text string) {
	if slices.Min(values) == slices.Max(values) {
		values = values[:1]
	}
	for _, v := range values {
		text += " " + strconv.Itoa(v)
	}
	return text
}

// ptxEntry finds the kernels in PTX, which no ptxas has seen.
var ptxEntry = regexp.MustCompile(`(?m)^\s*(?:\.visible )?\.entry (\w+)\(`)
