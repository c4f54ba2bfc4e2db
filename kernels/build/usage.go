package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
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
			// Functions that it calls have lines of their own.
			u.stack, u.spilled = max(u.stack, atoi(m[1])), u.spilled+atoi(m[2])+atoi(m[3])
		} else if m := takesLine.FindStringSubmatch(line); m != nil {
			u.registers = atoi(m[1])
			if m := sharedPart.FindStringSubmatch(line); m != nil {
				u.shared = atoi(m[1])
			}
		} else {
			if (!strings.HasPrefix(line, "ptxas info") || strings.Contains(line, "(C")) && strings.TrimSpace(line) != "" {
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

// ptxEntry begins a kernel in PTX, which no ptxas has seen.
var ptxEntry = regexp.MustCompile(`(?m)^\s*(?:\.visible\s+)?\.entry\s+([\w$]+)`)

func ptxEntries(ptx []byte) map[string]usage {
	kernels := map[string]usage{}
	for _, m := range ptxEntry.FindAllSubmatch(ptx, -1) {
		kernels[string(m[1])] = usage{}
	}
	return kernels
}

// entries joins what kernels take on each architecture. All must have the same
// ones. PTX takes nothing yet.
func entries(archs []string, of []map[string]usage) (map[string]string, error) {
	names := kernelNames(of)
	if names == nil {
		return nil, errors.New("there are no kernels")
	}
	joined := map[string]string{}
	for _, name := range names {
		var registers, shared, stack, spilled []int
		for i, kernels := range of {
			u, ok := kernels[name]
			if !ok {
				return nil, fmt.Errorf("kernel %s is missing for %s", name, archs[i])
			}
			if virtual(archs[i]) {
				continue
			}
			registers, shared = append(registers, u.registers), append(shared, u.shared)
			stack, spilled = append(stack, u.stack), append(spilled, u.spilled)
		}
		var parts []string
		for _, part := range []struct {
			what   string
			values []int
		}{{"registers", registers}, {"shared", shared}, {"stack", stack}, {"spilled", spilled}} {
			if len(part.values) > 0 && slices.Max(part.values) > 0 {
				parts = append(parts, part.what+numbers(part.values))
			}
		}
		joined[name] = strings.Join(parts, ", ")
	}
	return joined, nil
}

// kernelNames are the names that occur, sorted.
func kernelNames(of []map[string]usage) []string {
	all := map[string]bool{}
	for _, kernels := range of {
		for name := range kernels {
			all[name] = true
		}
	}
	return slices.Sorted(maps.Keys(all))
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

func printUsage(w io.Writer, archs []string, of []map[string]usage) {
	names := kernelNames(of)
	width := len(slices.MaxFunc(names, func(a, b string) int { return len(a) - len(b) }))
	for _, name := range names {
		for i, kernels := range of {
			if k := kernels[name]; !virtual(archs[i]) {
				fmt.Fprintf(w, "%-*s  %s  %3d registers  %5d shared  %4d stack  %4d spilled\n", width, name, archs[i], k.registers, k.shared, k.stack, k.spilled)
			}
		}
	}
}
