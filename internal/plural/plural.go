// Package plural mends what counting one gives: "1 pages".
package plural

import (
	"regexp"
	"strings"
)

// counted are the things that messages count.
const counted = `(?:appended |output |query |KV )?(?:append|bias|byte|choice|column|dimension|element|head|input|key|layer|length|page|part|position|prompt|row|sequence|slope|split|step|token|tensor|value|window|worker)`

var ones = regexp.MustCompile(`(?:^|[ (])1 ` + counted + `(?:es|s)\b`)

// Mend takes the ending of plurals behind the number one away.
func Mend(message string) string {
	if !strings.Contains(message, "1 ") {
		return message
	}
	return ones.ReplaceAllStringFunc(message, func(s string) string {
		if cut, ok := strings.CutSuffix(s, "biases"); ok {
			return cut + "bias"
		}
		return strings.TrimSuffix(s, "s")
	})
}
