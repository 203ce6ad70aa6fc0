/* Does this person's home answer? Asked by PAM (pam_exec) before anything touches it: a file server that hangs would keep
 * the session in the kernel for ever and its person without a word. */
#define _GNU_SOURCE
#include "home.h"
#include <pwd.h>

int main(void) {
    const char *user = getenv("PAM_USER");
    if (!user) {
        fputs("usage: PAM_USER=NAME home-answers, from pam_exec\n", stderr);
        return 2;
    }
    /* Who is not known has been turned away by the modules before, or will be by those behind. */
    const struct passwd *person = getpwnam(user);
    if (!person || home_answers(user, person->pw_dir))
        return 0;
    printf("Your home %s does not answer: its file server is slow or away. Jobs go on running; please try again later.\n",
           person->pw_dir);
    return 1;
}
