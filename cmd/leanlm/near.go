package main

import (
	"flag"
	"fmt"
	"slices"
	"strings"
)

// otherNames are names of flags in other programs, where no flag here has a similar one.
var otherNames = map[string]string{
	"interactive": "chat", "dtype": "weights", "outtype": "weights", "num-predict": "n", "max-tokens": "n", "mixed": "exact", "w8a8": "quantised-rows", "device": "device",
	"ngl": "device", "n-gpu-layers": "device", "gpu-layers": "device", "draft-max": "draft", "num-return-sequences": "n-samples", "max-length": "c",
}

// near returns the flags that an unknown flag may have meant; "" for any other error.
func near(f *flag.FlagSet, err error) string {
	unknown, ok := strings.CutPrefix(err.Error(), "flag provided but not defined: -")
	if !ok {
		return ""
	}
	unknown = strings.ToLower(strings.ReplaceAll(strings.TrimLeft(unknown, "-"), "_", "-"))
	var names []string
	best := max(1, len(unknown)/3) // more changes make another name
	f.VisitAll(func(f *flag.Flag) {
		switch d := distance(unknown, f.Name); {
		case strings.HasPrefix(f.Name, unknown) || len(f.Name) > 1 && strings.HasPrefix(unknown, f.Name), otherNames[unknown] == f.Name:
			if best > 0 {
				names, best = nil, 0
			}
			names = append(names, "-"+f.Name)
		case d < best && len(unknown) > 1:
			names, best = []string{"-" + f.Name}, d
		case d == best && best > 0 && len(unknown) > 1:
			names = append(names, "-"+f.Name)
		}
	})
	switch n := len(names); n {
	case 0:
		return ""
	case 1:
		return fmt.Sprintf(": did you mean %s?", names[0])
	default:
		return fmt.Sprintf(": did you mean %s or %s?", strings.Join(names[:n-1], ", "), names[n-1])
	}
}

// distance returns the number of insertions, deletions and changes of letters that make b of a.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before := slices.Clone(row)
		row[0] = i + 1
		for j := range len(b) {
			change := before[j]
			if a[i] != b[j] {
				change++
			}
			row[j+1] = min(change, before[j+1]+1, row[j]+1)
		}
	}
	return row[len(b)]
}
